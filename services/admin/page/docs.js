SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis], layout: "BaseLayout", tryItOutEnabled: true,
});
